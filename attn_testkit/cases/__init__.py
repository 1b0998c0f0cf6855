"""Cases: the record, its id, the dimensions in which cases differ, and server variants."""
