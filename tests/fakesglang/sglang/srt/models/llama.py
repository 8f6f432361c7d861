"""Two architectures: one captures by its base class, the other not at all."""


class Capturing:
    """Has both conventions."""

    def set_eagle3_layers_to_capture(self, layer_ids: object = None) -> None:
        """Stand for the real one."""

    def set_dflash_layers_to_capture(self, layer_ids: object) -> None:
        """Stand for the real one."""


class LlamaForCausalLM(Capturing):
    """Captures."""


class BertModel:
    """Does not."""
