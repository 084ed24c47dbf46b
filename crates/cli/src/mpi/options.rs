//! The options of `memferry mpirun` among those of the launcher.

use std::ffi::OsString;
use std::path::Path;

use anyhow::Context;
use memferry_bench::host::mpi::launcher;
use memferry_bench::host::process;

use crate::args::MpirunArgs;
use crate::show;

/// Options of launchers that are followed by one value: those of both MPIs, of Open MPI, and of MPICH. What has
/// a value in one MPI and none in another is not among them.
const ONE_VALUE: &str = "\
    n np host hosts hostfile machinefile wdir path bind-to map-by \
    c N H x npernode npersocket wd prefix rank-by rankfile rf cpu-set cpu-list cpus-per-proc cpus-per-rank \
    slot-list ppr timeout spawn-timeout am tune app default-hostfile add-host add-hostfile output \
    output-filename output-directory stdin xml-file report-uri report-pid ompi-server server-port \
    server-wait-time personality max-restarts max-vm-size fork-agent launch-agent preload-files pset \
    dvm dvm-uri hnp display runtime-options with-ft \
    f ppn perhost envlist genvlist membind configfile rmk launcher launcher-exec bootstrap bootstrap-exec \
    iface prepend-pattern outfile-pattern errfile-pattern order-nodes localhost nameserver topolib usize \
    pmi-port gpus-per-proc arch soft file demux";

/// Options that are followed by two.
const TWO_VALUES: &str = "mca gmca omca pmca prtemca env genv";

/// Moves the options of `memferry mpirun` that stand before the program out of the words of the launcher.
/// Words behind the program are its own.
pub(super) fn sort(args: &MpirunArgs) -> anyhow::Result<MpirunArgs> {
    let (collectives, shared_heap) = (args.collectives, args.shared_heap);
    let mut sorted = MpirunArgs { mpi: args.mpi.clone(), collectives, shared_heap, words: vec![] };
    let mut words = args.words.iter().cloned();
    if args.words.first().is_some_and(|word| launcher::names_launcher(word)) {
        sorted.words.extend(words.next());
    }
    let mut program = None;
    while let Some(word) = words.next() {
        match word.to_str() {
            Some("--collectives") => sorted.collectives = true,
            Some("--shared-heap") => sorted.shared_heap = true,
            Some("--mpi") => {
                let path =
                    words.next().context("--mpi needs a launcher or the folder of an MPI")?;
                sorted.mpi = Some(path.into());
            }
            Some(text) if text.starts_with("--mpi=") => sorted.mpi = Some(text[6..].into()),
            Some(option) if option.starts_with('-') && option != "--" => {
                let values = values_of(option);
                sorted.words.push(word);
                sorted.words.extend(words.by_ref().take(values));
            }
            _ => {
                sorted.words.push(word.clone());
                program = Some(word);
                break;
            }
        }
    }
    let behind: Vec<OsString> = words.collect();
    let own = behind.iter().find(|word| *word == "--collectives" || *word == "--shared-heap");
    if let (Some(own), Some(program)) = (own, program.filter(|program| !is_file(program))) {
        let (own, program) = (own.display(), program.display());
        show::print_error(&format!(
            "memferry: {own} is passed on, because `{program}` is taken for the program, which is no \
             file here; put {own} before the options of mpirun if it is not the program's"
        ));
    }
    sorted.words.extend(behind);
    Ok(sorted)
}

/// How many of the words behind an option of a launcher are its values.
fn values_of(option: &str) -> usize {
    let name = option.trim_start_matches('-');
    let has = |options: &str| usize::from(options.split(' ').any(|known| known == name));
    has(ONE_VALUE) + 2 * has(TWO_VALUES)
}

/// Whether a word can be the program: a file, or a name in the search path. Nothing is known behind `--`.
fn is_file(word: &OsString) -> bool {
    let is_found = || word.to_str().and_then(process::find).is_some();
    word == "--" || Path::new(word).is_file() || is_found()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sorted(line: &str) -> (Option<String>, bool, bool, String) {
        let words = line.split_whitespace().map(OsString::from).collect();
        let args = MpirunArgs { mpi: None, collectives: false, shared_heap: false, words };
        let sorted = sort(&args).unwrap();
        let words: Vec<_> = sorted.words.iter().map(|word| word.to_str().unwrap()).collect();
        let mpi = sorted.mpi.map(|path| path.display().to_string());
        (mpi, sorted.collectives, sorted.shared_heap, words.join(" "))
    }

    #[test]
    fn own_options_before_the_program_are_taken_out() {
        for (line, rest) in [
            ("--bind-to core --shared-heap ./a", "--bind-to core ./a"),
            ("mpirun -np 4 --shared-heap ./a -n 3", "mpirun -np 4 ./a -n 3"),
            ("--oversubscribe --shared-heap -x SHELL ./a", "--oversubscribe -x SHELL ./a"),
            ("--mca pml cm --shared-heap ./a", "--mca pml cm ./a"),
            ("--host=one:4 -genv A 1 --shared-heap ./a", "--host=one:4 -genv A 1 ./a"),
            ("-n 2 --shared-heap ./a : -n 2 ./b", "-n 2 ./a : -n 2 ./b"),
            ("-n 2 --shared-heap -- ./a", "-n 2 -- ./a"),
        ] {
            assert_eq!(sorted(line), (None, false, true, rest.to_owned()), "{line}");
        }
        let all = (Some("x".to_owned()), true, true, "-n 2 ./a".to_owned());
        assert_eq!(sorted("--collectives -n 2 --mpi x --shared-heap ./a"), all);
        assert_eq!(sorted("-n 2 --mpi=x --shared-heap --collectives ./a"), all);
    }

    #[test]
    fn words_behind_the_program_stay_its_own() {
        for line in [
            "./a --shared-heap",
            "-n 2 ./a --mpi x --collectives",
            "--oversubscribe ./a --shared-heap",
            "-n 2 -- ./a --shared-heap",
            "-n 2 ./a : -n 2 ./b --shared-heap",
            "-wdir /tmp ./a --collectives",
        ] {
            assert_eq!(sorted(line), (None, false, false, line.to_owned()), "{line}");
        }
    }

    #[test]
    fn a_missing_value_is_an_error() {
        let words = vec!["-n".into(), "2".into(), "--mpi".into()];
        let args = MpirunArgs { mpi: None, collectives: false, shared_heap: false, words };
        assert!(sort(&args).unwrap_err().to_string().contains("--mpi needs"));
    }
}
