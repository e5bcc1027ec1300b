"""Reading units from the SSD ahead of the pass that needs them."""
