# Start the run again until it is finished: exit code 75 means stopped and saved.
while true; do
    jaxgpt train gpt2 --out runs/gpt2 --data.path fineweb --resume
    [ $? = 75 ] || break
done
