"""How close the planner comes: to real steps on the CPU, and to figures that others have published."""
