"""Reports: a plan or a verification for people."""
