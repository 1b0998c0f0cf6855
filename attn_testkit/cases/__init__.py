"""Cases: the record, its id, server variants and the other features in which cases differ."""
