"""Read, recognise, fit and save weights."""
