"""What LoRA adapters cost."""
