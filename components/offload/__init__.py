"""Host memory for what the device need not hold all the time: one budget, exact slabs, copies."""
