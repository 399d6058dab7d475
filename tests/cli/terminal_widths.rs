//! Tables on terminals of several widths, and for a pipe: whole columns are left out, and no number is cut.

use rustix::termios::{Winsize, tcsetwinsize};

use super::*;

/// What a command prints on a terminal of this width. `columns` is the value of COLUMNS.
fn printed(served: &Served, arguments: &[&str], width: u16, columns: Option<&str>) -> Vec<String> {
    let (mut ours, theirs) = pseudo_terminal();
    tcsetwinsize(&theirs, Winsize { ws_row: 24, ws_col: width, ws_xpixel: 0, ws_ypixel: 0 }).expect("a size");
    let mut command = keyward(arguments);
    command.arg("--socket").arg(served.folder.path().join("admin.sock")).env_remove("COLUMNS");
    columns.into_iter().for_each(|columns| _ = command.env("COLUMNS", columns));
    command.stdin(Stdio::null()).stdout(theirs).stderr(Stdio::null());
    let mut child = command.spawn().expect("keyward starts");
    drop(command);
    let mut seen = Vec::new();
    // The terminal ends with the last process that has it open.
    drop(ours.read_to_end(&mut seen));
    assert_eq!(child.wait().expect("it is ours").code().map(|code| code < 2), Some(true));
    String::from_utf8(seen).expect("UTF-8").lines().map(|line| line.trim_end().to_owned()).collect()
}

#[test]
fn a_table_fits_its_terminal_and_a_pipe_gets_whole_rows() {
    let served = Served::start("drain.timeout = '7s'\n", |_, _| {});
    let (code, piped, _) = served.ask(&["show", "config"]);
    assert_eq!(code, 0);
    let widest = |lines: &[String]| lines.iter().map(|line| line.chars().count()).max().unwrap_or(0);
    let whole: Vec<String> = piped.lines().map(str::to_owned).collect();
    assert!(widest(&whole) > 60 && !piped.contains('…'), "the rows are longer than a narrow terminal");
    for width in [60, 80, 100, 200] {
        let lines = printed(&served, &["show", "config"], width, None);
        assert!(lines.len() == whole.len() && widest(&lines) <= width.into(), "{width}: {lines:#?}");
        assert!(lines.iter().any(|line| line.starts_with("drain.timeout")), "{lines:#?}");
        for topic in ["replicas", "version", "limits"] {
            let lines = printed(&served, &["show", topic], width, None);
            assert!(widest(&lines) <= width.into(), "{topic} {width}: {lines:#?}");
        }
    }
    assert!(widest(&printed(&served, &["show", "config"], 200, Some("60"))) <= 60, "COLUMNS wins");
    assert!(widest(&printed(&served, &["show", "config"], 60, Some("much"))) <= 60, "COLUMNS is no number");
    let wide = printed(&served, &["show", "replicas", "-o", "wide"], 60, None);
    assert!(wide[0].contains("SHARDS") && widest(&wide) > 60, "{wide:#?}");
}
