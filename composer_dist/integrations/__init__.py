"""This library as a part of other trainers, through their own seams: one module for each library.

Each module needs the library that it is named after, and imports it; nothing imports them by itself.
"""
