"""Models, tokenizers and processors by name: of the hub, a folder or a GGUF file; and what a model costs."""
