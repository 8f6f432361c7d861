"""The screens and dialogs of the console."""
