"""`python -m tests.golden`: put the present losses on record. Look at the change before commit."""

from components.titan.device import use_cpu

if __name__ == "__main__":
    use_cpu()
    from tests.golden.record import CASES, file_of, write

    for case in CASES:
        write(case)
        print(file_of(case), file_of(case).read_text().split())
