"""What other libraries reject, and what their keys are called here."""
