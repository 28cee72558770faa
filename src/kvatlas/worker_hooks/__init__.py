"""What runs inside or beside an inference engine; imports the base dependencies only."""
