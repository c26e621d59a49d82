"""What a run reads: texts, and rows of tables."""
