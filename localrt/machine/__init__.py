"""What this computer is, and how fast it reads, multiplies and copies."""
