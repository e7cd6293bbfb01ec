"""What is shown to people: figures for papers, and one self-contained page per run."""
