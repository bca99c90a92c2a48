"""``report.html`` of runs and evaluations: the studio's pages with their answers in one file of bounded size."""
