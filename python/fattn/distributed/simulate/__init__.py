"""How long ring attention takes on GPUs that are not there: the schedule is the real one, the times of its parts are constants.

    work          what each rank computes and gets in each hop
    model         how long the hops of all ranks take
    calibrate     the constants, from records of `bench`
    command       python -m fattn.distributed simulate
"""
