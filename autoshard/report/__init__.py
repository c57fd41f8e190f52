"""The toolkit of reports: columns, units, pages, progress."""
