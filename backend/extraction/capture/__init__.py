"""The capture hook: hidden states out of SGLang's forward pass into files, one a request.

This package stands alone: relative imports, Python 3.10, torch in `hook` and `sink`, nothing else of ours; `writing`
is a program of its own, which the hook starts to write the files. The launcher copies the package as
`eightzeros_capture` into a folder on the server's PYTHONPATH (backend.extraction.staging does that) and names
`eightzeros_capture.hook:factory` in `--forward-hooks`.

A request is ours when its rid begins with `RUN-`. A rid ends with `-TOKENS`, the length of its prompt, for a
forward pass does not say which chunk of a prompt is the last; and it is used once. Its file is `RID.states`:

    4,096 bytes of JSON | ids int64 [L] | aux [L, K x H] | last [L, H]

in the model's dtype and the machine's byte order. `aux` holds the capture points side by side, lowest first
(point k is the residual stream entering layer k); `last` is after the final norm. While rows are missing it is
`RID.N.part`: what is called `RID.states` is whole. A request that cannot be captured leaves `RID.failed`, JSON
with its `reason`, and `rankN.json` holds each rank's counters.

The reader removes what it has read, as it appears and not only when the server has answered; and it removes
the `.part` of a request that it has given up. The bytes in the folder are bounded, and so are the slots that
passes are copied into; where either is used up the pass waits, at most `patience_s` (SGLang's watchdog ends a
server whose pass takes 300 s), and then the request fails with that reason.

Nothing here raises into a running server, which would not survive it. Only rank 0 of each attention-TP group
writes; every rank sets its layers, for capturing takes part in collectives.
"""
