"""What is wrong with a configuration, as far as that is known without torch."""
