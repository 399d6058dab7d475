//! State files that are not on the disk.
//!
//! Owns: the findings. Must not know: the content of a file.

use std::time::SystemTime;

use super::DoctorFindings;
use keyward_base::io::kept_file::UnwrittenFile;

pub(super) fn check(unwritten: &[UnwrittenFile], now: SystemTime, findings: &mut DoctorFindings) {
    for UnwrittenFile { setting, path, since, error, loss } in unwritten {
        let minutes = now.duration_since(*since).unwrap_or_default().as_secs() / 60;
        let path = path.display();
        let what = format!("{path} has not been written for {minutes} minutes ({error}): {loss}");
        let fix = "make room on the disk, or let Keyward's user write into the folder: it is tried again \
                   every 2 s";
        findings.error("state_file_unwritten", *setting, what, fix);
    }
}
