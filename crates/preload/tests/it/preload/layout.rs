//! Where the jumps of the entry points lie.

use std::process::Command;

use crate::preload::support::{library, text};
use memferry_testing::{Requirement, skip};

const ENTRY_POINTS: [&str; 7] =
    ["memcpy", "memmove", "mempcpy", "__mempcpy", "memset", "memcmp", "bcmp"];

/// An instruction: where it is, how long it is, its name, and whether it accesses memory.
struct Instruction {
    address: usize,
    bytes: usize,
    name: String,
    has_memory: bool,
}

impl Instruction {
    /// Reads a line such as `  16a57:\t73 77\tjae    16ad0 <memcpy+0x80>`.
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split('\t');
        let address = usize::from_str_radix(fields.next()?.trim().strip_suffix(':')?, 16).ok()?;
        let bytes = fields.next()?.split_whitespace().count();
        let text = fields.next()?;
        let words = text.split_whitespace();
        // With `notrack` and the like before it.
        let name = words.clone().find(|word| word.starts_with('j') || *word == "ret");
        let name = name.or(words.clone().next())?.to_owned();
        Some(Self { address, bytes, name, has_memory: text.contains('[') })
    }

    fn is_jump(&self) -> bool {
        self.name.starts_with('j') || ["ret", "call"].contains(&self.name.as_str())
    }

    /// Whether a conditional jump behind it can be executed as one instruction with it.
    fn is_comparison(&self) -> bool {
        let name = self.name.as_str();
        ["cmp", "test"].contains(&name)
            || (["sub", "add", "and", "inc", "dec"].contains(&name) && !self.has_memory)
    }
}

/// The Skylake family executes such jumps a third slower: it keeps no decoded instructions of 32 bytes with one.
#[test]
fn no_jump_of_an_entry_point_crosses_or_touches_the_end_of_32_bytes() {
    let mut objdump = Command::new("objdump");
    let output = objdump.args(["-d", "-w", "-M", "intel"]).arg(library()).output();
    let Ok(output) = output else {
        return skip(Requirement::Programs, "objdump is not installed");
    };
    assert!(output.status.success(), "{}", text(&output));
    let listing = String::from_utf8_lossy(&output.stdout);
    for name in ENTRY_POINTS {
        let lines = listing.lines().skip_while(|line| !line.ends_with(&format!(" <{name}>:")));
        let lines = lines.skip(1).take_while(|line| !line.is_empty());
        let code: Vec<_> = lines.filter_map(Instruction::parse).collect();
        assert!(code.first().is_some_and(|first| first.address % 64 == 0), "{name}");
        let mut jumps = 0;
        for (index, jump) in code.iter().enumerate().filter(|(_, it)| it.is_jump()) {
            let before = index.checked_sub(1).map(|before| &code[before]);
            let is_fused = jump.name != "jmp" && before.is_some_and(Instruction::is_comparison);
            let start = before.filter(|_| is_fused).unwrap_or(jump).address;
            let end = jump.address + jump.bytes;
            assert_eq!(start / 32, end / 32, "{name}: {} at {:#x}", jump.name, jump.address);
            jumps += 1;
        }
        assert!(jumps >= 3, "{name} has {jumps} jumps");
    }
}
