"""An engine of others that reads weights from the disk: Accelerate."""
