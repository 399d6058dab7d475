//! The operating system's figures of this process, under Prometheus's standard names without a prefix.
//!
//! Owns: names, help texts and units; reading `/proc` at a scrape. Must not know: the parts of Keyward.
//! Invariant: a figure that `/proc` does not tell is left out, and all are left out on systems without
//! `/proc`.

use std::fmt;
use std::fs;
use std::sync::OnceLock;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;

/// Reads the figures at each scrape.
#[derive(Debug)]
pub(super) struct ProcessCollector;

/// The kernel's units in `/proc/self/stat`.
#[derive(Clone, Copy)]
struct KernelUnits {
    ticks_per_second: f64,
    page_size: u64,
}

/// The figures of `/proc/self/stat`.
#[derive(Debug, PartialEq)]
struct ProcessStat {
    /// User and system time, in seconds.
    cpu_seconds: f64,
    threads: u64,
    /// Time between the boot of the machine and the start of the process, in seconds.
    started_after_boot: f64,
    virtual_bytes: u64,
    resident_bytes: u64,
}

impl ProcessStat {
    /// Parses the fields of proc_pid_stat(5).
    fn parse(text: &str, units: KernelUnits) -> Option<Self> {
        // The second field is the program's name in parentheses, and may have spaces and parentheses itself.
        let (_, fields) = text.rsplit_once(") ")?;
        let fields: Vec<&str> = fields.split_ascii_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        let seconds = |ticks: u64| ticks as f64 / units.ticks_per_second;
        Some(Self {
            cpu_seconds: seconds(field(14)?.saturating_add(field(15)?)),
            threads: field(20)?,
            started_after_boot: seconds(field(22)?),
            virtual_bytes: field(23)?,
            resident_bytes: field(24)?.saturating_mul(units.page_size),
        })
    }
}

/// The soft limit on open files in the text of `/proc/self/limits`; `None` if unlimited.
fn max_open_files(limits: &str) -> Option<u64> {
    let limit = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    limit.split_ascii_whitespace().next()?.parse().ok()
}

/// The boot of the machine in seconds of the Unix epoch, from the text of `/proc/stat`.
fn boot_time(stat: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

/// The number of open file descriptors, as the kernel tells it. Since Linux 6.2 the size of the directory
/// tells the number; before, the entries are counted, and one entry is the directory itself, opened for
/// counting.
pub fn open_files() -> Option<u64> {
    const FOLDER: &str = "/proc/self/fd";
    let size = fs::metadata(FOLDER).ok()?.len();
    if size > 0 {
        return Some(size);
    }
    let entries = fs::read_dir(FOLDER).ok()?.count();
    u64::try_from(entries).ok()?.checked_sub(1)
}

/// The boot of the machine, read once: the kernel lists all interrupts in the same file.
fn boot_time_read_once() -> Option<u64> {
    static BOOT: OnceLock<Option<u64>> = OnceLock::new();
    *BOOT.get_or_init(|| boot_time(&fs::read_to_string("/proc/stat").ok()?))
}

#[cfg(target_os = "linux")]
fn kernel_units() -> Option<KernelUnits> {
    let page_size = u64::try_from(rustix::param::page_size()).ok()?;
    Some(KernelUnits { ticks_per_second: rustix::param::clock_ticks_per_second() as f64, page_size })
}

#[cfg(not(target_os = "linux"))]
fn kernel_units() -> Option<KernelUnits> {
    None
}

impl Collector for ProcessCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(units) = kernel_units() else { return Ok(()) };
        let text = fs::read_to_string("/proc/self/stat").ok();
        if let Some(stat) = text.and_then(|text| ProcessStat::parse(&text, units)) {
            let help = "CPU time of the process, in user and system mode.";
            let cpu =
                encoder.encode_descriptor("process_cpu", help, Some(&Unit::Seconds), MetricType::Counter)?;
            ConstCounter::new(stat.cpu_seconds).encode(cpu)?;
            let mut put = |name, help, unit, value| gauge(&mut encoder, name, help, unit, value);
            let help = "Virtual memory of the process.";
            put("process_virtual_memory", help, Some(Unit::Bytes), stat.virtual_bytes)?;
            let help = "Resident memory of the process.";
            put("process_resident_memory", help, Some(Unit::Bytes), stat.resident_bytes)?;
            put("process_threads", "Threads of the process.", None, stat.threads)?;
            if let Some(boot) = boot_time_read_once() {
                let start = boot as f64 + stat.started_after_boot;
                let help = "Start of the process, in seconds of the Unix epoch.";
                gauge(&mut encoder, "process_start_time", help, Some(Unit::Seconds), start)?;
            }
        }
        if let Some(open) = open_files() {
            gauge(&mut encoder, "process_open_fds", "Open file descriptors of the process.", None, open)?;
        }
        let limits = fs::read_to_string("/proc/self/limits").ok();
        if let Some(most) = limits.and_then(|limits| max_open_files(&limits)) {
            let help = "Limit on the open file descriptors of the process.";
            gauge(&mut encoder, "process_max_fds", help, None, most)?;
        }
        Ok(())
    }
}

/// Writes one gauge.
fn gauge<V>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<Unit>,
    value: V,
) -> fmt::Result
where
    ConstGauge<V>: EncodeMetric,
{
    let metric = encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Gauge)?;
    ConstGauge::new(value).encode(metric)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNITS: KernelUnits = KernelUnits { ticks_per_second: 100.0, page_size: 4096 };

    #[test]
    fn stat_is_parsed_after_any_program_name() {
        let text = "7 (a) R (b) S 1 7 7 0 -1 4194304 99 0 0 0 150 25 3 4 20 0 12 0 1250 3133440 406 18446744073709551615 1\n";
        let stat = ProcessStat {
            cpu_seconds: 1.75,
            threads: 12,
            started_after_boot: 12.5,
            virtual_bytes: 3_133_440,
            resident_bytes: 406 * 4096,
        };
        assert_eq!(ProcessStat::parse(text, UNITS), Some(stat));
        for cut in ["", "7 (a) S 1 7", "7 (a"] {
            assert_eq!(ProcessStat::parse(cut, UNITS), None);
        }
    }

    #[test]
    fn limits_and_boot_time_are_found_in_their_files() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max processes             96365                96365                processes \n\
                      Max open files            20000                524288               files     \n";
        assert_eq!(max_open_files(limits), Some(20_000));
        assert_eq!(max_open_files(&limits.replace("20000", "unlimited")), None);
        assert_eq!(
            boot_time("cpu  1 2\nintr 5 6\nctxt 7\nbtime 1764068000\nprocesses 9\n"),
            Some(1_764_068_000)
        );
        assert_eq!((max_open_files(""), boot_time("")), (None, None));
    }
}
