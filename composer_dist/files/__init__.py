"""What weight files hold, under which names, and how slices of them are read, checked and written."""
