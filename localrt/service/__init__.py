"""What answers requests: requests are made, passes watched, caches kept, budgets changed."""
