"""Random programs: how they are drawn, run and made smaller."""
