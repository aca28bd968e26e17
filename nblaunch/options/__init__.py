"""The options of a launch: one table that magics, `run()`, `Session`, `PET_` variables and docs share."""
