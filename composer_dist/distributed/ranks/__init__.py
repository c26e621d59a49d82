"""Processes that find each other, agree, and notice the dead."""
