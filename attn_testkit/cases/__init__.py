"""Cases: the record, its id, the features in which cases differ, and server variants."""
