//! The first process (init) of the machine. The program that starts a machine is also packed into
//! it, where the kernel starts it as init. It sets up the machine, runs the programs of the plan,
//! reports to the host, and stops the machine.

mod modules;
mod mounts;
mod nic;
mod port;
mod programs;

use std::path::Path;
use std::{fs, panic, process};

use rustix::system::{RebootCommand, reboot};

use crate::plan::{GuestPlan, PLAN};
use crate::wire::GuestMessage;
use port::Port;

/// Returns immediately unless this process is the init of a machine that this library started. In
/// that case it executes the plan and never returns. A program that uses [`crate::Machine`] calls
/// this function first in `main`.
pub fn run_if_init() {
    // A container has a process with PID 1 too, but no plan.
    if process::id() != 1 || !Path::new(PLAN).exists() {
        return;
    }
    // A panic must not make the host wait until its timeout.
    panic::set_hook(Box::new(|panic| fail(&panic.to_string())));
    match run() {
        Ok(()) => stop(),
        Err(reason) => fail(&reason),
    }
}

fn run() -> Result<(), String> {
    mounts::mount_all()?;
    let mut port = Port::open()?;
    let plan = fs::read(PLAN).map_err(|error| format!("{PLAN}: {error}"))?;
    let plan = GuestPlan::decode(&plan).map_err(|error| format!("{PLAN}: {error}"))?;
    for module in &plan.modules {
        modules::load(Path::new(module))?;
    }
    if plan.card {
        nic::bind_to_vfio()?;
    }
    port.send(&GuestMessage::Ready)?;
    for (number, command) in plan.programs.iter().enumerate() {
        port.send(&GuestMessage::Begin(number))?;
        let end = programs::run(command, &plan.environment, &mut port)?;
        port.send(&GuestMessage::End(number, end))?;
    }
    port.drain();
    Ok(())
}

/// Reports the reason on the serial port, or on the console if the port cannot be opened.
fn fail(reason: &str) -> ! {
    let told = Port::open().and_then(|mut port| {
        port.send(&GuestMessage::Failure(reason.into()))?;
        port.drain();
        Ok(())
    });
    if told.is_err() {
        let _ = fs::write("/dev/console", format!("{reason}\n"));
    }
    stop()
}

/// Stops the machine by a reboot: QEMU runs with `-no-reboot`, so it exits instead.
fn stop() -> ! {
    rustix::fs::sync();
    let _ = reboot(RebootCommand::Restart);
    // The kernel panics when init exits, and reboots after a panic (`panic=-1`).
    process::exit(1)
}
