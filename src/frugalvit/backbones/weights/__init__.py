"""Read, recognize, fit and save weights."""
