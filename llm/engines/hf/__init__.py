"""Any transformers language model, generating in this process."""
