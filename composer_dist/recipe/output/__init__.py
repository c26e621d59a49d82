"""What a run leaves behind: its folder, and the summary at its end."""
