//! Sizes: of files and of lines.

use crate::report;
use crate::source::product_files;

/// Lines of one file under `src`, its tests apart.
const MAX_LINES: usize = 600;
/// Columns of a line.
const WIDTH: usize = 110;

#[test]
fn files_stay_readable() {
    let mut faults = Vec::new();
    for source in product_files() {
        let lines = source.product().lines().count();
        if lines > MAX_LINES {
            faults.push(format!("{}: {lines} lines", source.name));
        }
    }
    report("a file stops at 600 lines, tests apart: look for its second noun", &faults);
}

#[test]
fn every_line_fits_the_width() {
    let mut faults = Vec::new();
    for source in product_files() {
        for (line, number) in source.product().lines().zip(1..) {
            if line.chars().count() > WIDTH {
                faults.push(format!("{}:{number}", source.name));
            }
        }
    }
    report("a line has at most 110 columns", &faults);
}
