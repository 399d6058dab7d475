//! The limit of the operating system on the memory of this process: that of its control group.
//!
//! Owns: reading the limit, of control groups of either version, of the group and of the groups above. Must
//! not know: the use of the limit. Invariant: a limit that cannot be read is no limit.

use std::fs;
use std::path::{Path, PathBuf};

/// Higher limits are the kernel's word for no limit.
const NO_LIMIT: u64 = 1 << 60;

/// The memory limit of this process in bytes; `None` without a limit.
#[must_use]
pub fn of_process() -> Option<u64> {
    limit_below(Path::new("/"))
}

fn limit_below(root: &Path) -> Option<u64> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    groups.lines().filter_map(|line| limit_of_group(root, line)).min()
}

/// The limit of a line `ID:CONTROLLERS:PATH`.
fn limit_of_group(root: &Path, line: &str) -> Option<u64> {
    let mut parts = line.splitn(3, ':').skip(1);
    let (controllers, path) = (parts.next()?, parts.next()?);
    let (mount, file) = match controllers {
        "" => ("sys/fs/cgroup", "memory.max"),
        _ if controllers.split(',').any(|name| name == "memory") => {
            ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
        }
        _ => return None,
    };
    // A container sees its own group as the root, whatever the path says.
    let groups = Path::new(path).ancestors().filter_map(|group| group.strip_prefix("/").ok());
    let files = groups.map(|group| [root, Path::new(mount), group, Path::new(file)].iter().collect());
    let limits = files.filter_map(|file: PathBuf| fs::read_to_string(file).ok()?.trim().parse().ok());
    limits.filter(|limit| *limit < NO_LIMIT).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(groups: &str, files: &[(&str, &str)]) -> Option<u64> {
        let root = tempfile::tempdir().expect("a folder");
        for (name, text) in [("proc/self/cgroup", groups)].iter().chain(files) {
            let file = root.path().join(name);
            fs::create_dir_all(file.parent().expect("a folder")).expect("made");
            fs::write(file, text).expect("written");
        }
        limit_below(root.path())
    }

    #[test]
    fn the_lowest_limit_of_the_group_and_of_those_above_counts() {
        let group = "0::/system.slice/keyward.service\n";
        let own = "sys/fs/cgroup/system.slice/keyward.service/memory.max";
        assert_eq!(limit(group, &[]), None);
        assert_eq!(limit(group, &[(own, "max\n")]), None);
        assert_eq!(limit(group, &[(own, "1073741824\n")]), Some(1 << 30));
        let above = ("sys/fs/cgroup/system.slice/memory.max", "536870912\n");
        assert_eq!(limit(group, &[(own, "1073741824\n"), above]), Some(1 << 29));
        // Within a container.
        assert_eq!(limit("0::/docker/1a\n", &[("sys/fs/cgroup/memory.max", "4096\n")]), Some(4096));
        let old = "9:cpu,cpuacct:/a\n7:memory:/a/b\n0::/\n";
        let file = "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes";
        assert_eq!(limit(old, &[(file, "2048\n")]), Some(2048));
        assert_eq!(limit(old, &[(file, "9223372036854771712\n")]), None);
        assert_eq!(limit("", &[]), None);
    }
}
