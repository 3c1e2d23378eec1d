"""SmolLM2-135M-Instruct as a GGUF file, beside this one."""
