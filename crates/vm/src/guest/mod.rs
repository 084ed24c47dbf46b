//! The first process of the machine. The program that starts a machine is packed into it and started
//! there a second time, by the kernel: it makes the machine ready, runs what the plan names, tells
//! the host of it, and ends the machine.

mod card;
mod modules;
mod mounts;
mod port;
mod programs;

use std::path::Path;
use std::{fs, panic, process};

use rustix::system::{RebootCommand, reboot};

use crate::plan::{PLAN, Plan};
use crate::wire::Note;
use port::Port;

/// Does nothing unless this is the first process of a machine that this library started; then it does
/// what it was started for, and never returns. A program that uses [`crate::Machine`] calls this at
/// the top of `main`, before it looks at anything else.
pub fn enter_if_first() {
    // A container has a first process too, but no plan.
    if process::id() != 1 || !Path::new(PLAN).exists() {
        return;
    }
    // Even a bug must not leave the host waiting for its limit.
    panic::set_hook(Box::new(|panic| give_up(&panic.to_string())));
    match live() {
        Ok(()) => stop(),
        Err(reason) => give_up(&reason),
    }
}

fn live() -> Result<(), String> {
    mounts::mount_all()?;
    let mut port = Port::open()?;
    let plan = fs::read(PLAN).map_err(|error| format!("{PLAN}: {error}"))?;
    let plan = Plan::decode(&plan).map_err(|error| format!("{PLAN}: {error}"))?;
    for module in &plan.modules {
        modules::load(Path::new(module))?;
    }
    if plan.card {
        card::hand_over()?;
    }
    port.tell(&Note::Ready)?;
    for (number, command) in plan.programs.iter().enumerate() {
        port.tell(&Note::Begin(number))?;
        let end = programs::run(command, &plan.environment, &mut port)?;
        port.tell(&Note::End(number, end))?;
    }
    port.drain();
    Ok(())
}

/// Says why, on the port, or on the console if there is no port.
fn give_up(reason: &str) -> ! {
    let told = Port::open().and_then(|mut port| {
        port.tell(&Note::Trouble(reason.into()))?;
        port.drain();
        Ok(())
    });
    if told.is_err() {
        let _ = fs::write("/dev/console", format!("{reason}\n"));
    }
    stop()
}

/// Ends the machine: the host's QEMU takes a restart for an end.
fn stop() -> ! {
    rustix::fs::sync();
    let _ = reboot(RebootCommand::Restart);
    // The kernel panics without its first process, and restarts after a panic.
    process::exit(1)
}
