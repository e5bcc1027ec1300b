"""Memory against budgets and forecasts: each cell of a matrix is a process of its own."""
