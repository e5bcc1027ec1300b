"""Vision towers beside libmtmd."""
