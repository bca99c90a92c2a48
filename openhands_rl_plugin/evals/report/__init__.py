"""Reports and comparisons of evaluation runs: tables, figures, pages."""
