"""What lies in an L2 folder: records that LMCache wrote, and files that are not records."""
