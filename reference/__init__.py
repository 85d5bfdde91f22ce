"""The reference: Llama 3 trained on one device in plain torch. Small, trusted, and it never imports torch.distributed."""
