// test/check.h: what the test programs in C share: a check that prints what fails, and the counts.
#pragma once
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>

static int passed, failed;

__attribute__((format(printf, 2, 3))) static bool check(bool ok, const char *format, ...) {
    va_list args;
    va_start(args, format);
    if (ok)
        passed++;
    else {
        failed++;
        printf("FAIL ");
        vprintf(format, args);
        printf("\n");
    }
    va_end(args);
    return ok;
}

// The closing line; the program's exit status.
static int check_end(void) {
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}
