"""What reads the forms of records besides text, a module each: `treewise.data.io.forms` says which."""
