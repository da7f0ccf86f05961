"""Random programs: what they are and how they are drawn, run and made smaller."""
