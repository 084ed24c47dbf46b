//! Searches for inputs that make a target fail: `MEMFERRY_FUZZ` names the target, the arguments are
//! libFuzzer's.
#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use memferry_fuzz::Target;

fn chosen() -> &'static Target {
    static CHOSEN: OnceLock<Target> = OnceLock::new();
    CHOSEN.get_or_init(|| {
        let name = std::env::var("MEMFERRY_FUZZ").unwrap_or_default();
        memferry_fuzz::target(&name).expect("MEMFERRY_FUZZ names a target")
    })
}

fuzz_target!(
    init: {
        memferry_fuzz::run_if_attacker();
        chosen();
    },
    |bytes: &[u8]| (chosen().run)(bytes)
);
