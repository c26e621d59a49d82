"""What people see: tables of plans and preparations."""
