"""`pdserve bench compare`: split serving against colocated engines, one after another on the same cores.

settings        what was asked for                         pure
configurations  the five deployments, their commands       pure
objectives      SLOs from an engine beside a busy one      pure
budget          which token budgets to try, which won      pure
ratios          attainment, goodput, ratios, drift         pure
outcome         all cells together                         pure
tables          all of it as text                          pure
folder          what a comparison leaves, and resumes from
cpu             cores that processes used, from /proc
deployment      one `pdserve up`, started and ended
calibration     measures what objectives are made of
sweep           offers all rates to one deployment
comparison      the order of things
command         the flags, the signals, what is printed
"""
