"""What reads the forms of records besides text, a module each: `treewise.data.forms` says which."""
