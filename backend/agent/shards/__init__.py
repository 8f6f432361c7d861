"""Looking into shard files on the host: without torch, running nothing a pickle says, reading heads only."""
